"""Exchange of vectors between programs of a running kernel: a float32's lowest bit says which layer wrote it.

As in NCCL's LL protocol, each word carries its flag, so programs need no fence and no barrier. One bit is enough: a
program overwrites a word in the next layer, after it has received outputs of all programs that read the word.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))


@triton.constexpr_function
def load_once(n: int) -> tuple[str, str]:
    """Return assembly that computes the addresses of n words, and assembly that loads them, up to four at a time.

    Operands: the n words loaded, their base addresses, their indices.
    """
    width = min(n, 4)
    kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[width]
    addresses, loads = "", ""
    for i in range(0, n, width):
        registers = ", ".join(f"${i + j}" for j in range(width))
        target = registers if width == 1 else f"{{{registers}}}"
        addresses += f".reg .b64 a{i}; mad.wide.s32 a{i}, ${2 * n + i}, 4, ${n + i}; "
        loads += f"ld.relaxed.gpu.global.{kind} {target}, [a{i}]; "
    return addresses, loads


@triton.constexpr_function
def asking_load(n: int) -> str:
    both: tuple[str, str] = load_once(n)
    return "{ " + both[0] + both[1] + "}"


@triton.constexpr_function
def waiting_load(n: int, is_shared: bool, are_asked: bool) -> str:
    """Return assembly that loads n words until all are flagged; are_asked: the first load was done before.

    Operands: those of `load_once`, then each word's flag, and with are_asked the result of its first load. With more
    than four words per thread, or if all warps wait for the same words (is_shared), only lane 0 polls its first word
    before all lanes load again: polling by all lanes would delay the stores.
    """
    both: tuple[str, str] = load_once(n)
    addresses, loads = both
    if are_asked:
        addresses += "".join(f"mov.b32 ${i}, ${4 * n + i}; " for i in range(n)) + "bra TEST; "
    flag = f"${3 * n}"
    tests = "TEST: mov.b32 t, 0; " + "".join(f"xor.b32 u, ${i}, {flag}; or.b32 t, t, u; " for i in range(n))
    tests += "and.b32 t, t, 1; setp.ne.u32 p, t, 0; "
    if n <= 4 and not is_shared:
        return "{ .reg .pred p; .reg .b32 t, u; " + addresses + "AGAIN: " + loads + tests + "@p bra AGAIN; }"
    return (
        "{ .reg .pred p, q; .reg .b32 t, u; " + addresses + "AGAIN: " + loads + tests
        + "vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; mov.u32 u, %laneid; setp.ne.u32 q, u, 0; @q bra REST; "
        + f"ONE: ld.relaxed.gpu.global.b32 u, [a0]; xor.b32 u, u, {flag}; and.b32 u, u, 1; setp.ne.u32 q, u, 0; "
        + "@q bra ONE; REST: bar.warp.sync 0xffffffff; bra AGAIN; DONE: mov.b32 t, 0; }"
    )  # fmt: skip


@triton.constexpr_function
def constraints(n: int, per_word: int) -> str:
    """Return the constraints of n words' operands. per_word: 32-bit input operands of each word."""
    return ",".join(["=&r"] * n + ["l"] * n + ["r"] * per_word * n)


@gluon.jit
def receive(ptr, words, flag, N: gl.constexpr, IS_SHARED: gl.constexpr = False):
    """Return the numbers that other programs store at `ptr + words`, N per thread, as soon as all are flagged."""
    return gl.inline_asm_elementwise(
        waiting_load(N, IS_SHARED, False), constraints(N, 2), [ptr, words, flag], dtype=gl.float32, is_pure=False,
        pack=N,
    )  # fmt: skip


@gluon.jit
def ask(ptr, words, N: gl.constexpr):
    """Load the words at `ptr + words`, flagged or not, N per thread, for `receive_asked` after other work."""
    return gl.inline_asm_elementwise(
        asking_load(N), constraints(N, 1), [ptr, words], dtype=gl.int32, is_pure=False, pack=N
    )


@gluon.jit
def receive_asked(asked, ptr, words, flag, N: gl.constexpr):
    """Return what `receive` does; `asked` has the words that `ask` loaded."""
    return gl.inline_asm_elementwise(
        waiting_load(N, False, True), constraints(N, 3), [ptr, words, flag, asked], dtype=gl.float32, is_pure=False,
        pack=N,
    )  # fmt: skip


@gluon.jit
def ask_for_piece(ptr, K, PADDED: gl.constexpr):
    """Load K words, at most PADDED, for `receive_piece`; see `ask`."""
    ks = gl.arange(0, PADDED, VECTOR)
    return ask(ptr, gl.where(ks < K, ks, ks % 4), PADDED // 256)


@gluon.jit
def receive_piece(asked, ptr, flag, K, PADDED: gl.constexpr):
    """Return what `receive_vector` does; `asked` has the words that `ask_for_piece` loaded."""
    ks = gl.arange(0, PADDED, VECTOR)
    x = receive_asked(asked, ptr, gl.where(ks < K, ks, ks % 4), flag, PADDED // 256)
    return gl.where(ks < K, x, 0.0)


@gluon.jit
def flagged(numbers, flag):
    """Convert float32 numbers to words with the flag."""
    return (numbers.to(gl.int32, bitcast=True) & -2) | flag


@gluon.jit
def receive_vector(ptr, flag, K, PADDED: gl.constexpr):
    """Receive a vector of K numbers as (PADDED,), with zeros beyond K; each thread holds a part."""
    ks = gl.arange(0, PADDED, VECTOR)
    inside = gl.where(ks < K, ks, ks % 4)
    return gl.where(ks < K, receive(ptr, inside, flag, PADDED // 256), 0.0)


@gluon.jit
def load_vector(ptr, K: gl.constexpr):
    """Load K bfloat16 numbers, which no program writes, in the layout of `receive_vector`."""
    ks = gl.arange(0, triton.next_power_of_2(K), VECTOR)
    at = gl.max_contiguous(gl.multiple_of(ptr + ks, [8]), [4])
    return gl.load(at, mask=ks < K, other=0.0).to(gl.float32)


@gluon.jit
def store_vector(ptr, x, K: gl.constexpr):
    """Store the first K numbers of a vector of `load_vector` or `receive_vector` as bfloat16."""
    ks = gl.arange(0, triton.next_power_of_2(K), VECTOR)
    gl.store(gl.max_contiguous(gl.multiple_of(ptr + ks, [8]), [4]), x.to(gl.bfloat16), mask=ks < K)
