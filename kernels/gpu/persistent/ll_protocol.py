"""Vectors between programs of a running kernel: the lowest bit of each float32 says which layer wrote it.

As in NCCL's LL protocol, each word carries its flag, so programs need no fence and no barrier. One bit is enough: a
program overwrites a word in the next layer, after outputs of all programs that have read it.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))


@triton.constexpr_function
def load_once(n: int) -> tuple[str, str]:
    """Return assembly that computes the addresses of n words, and that loads them by fours at most.

    Operands: the words; then of each the base address, and its number.
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
    """Return assembly that loads n words until all are flagged; are_asked: from the second time on.

    Operands: as above, then of each the flag, and what was loaded the first time. A thread with more than four words,
    or where all warps wait for the same ones, polls the first one, by lane 0 alone, before it loads all again: by all
    lanes it would delay the stores.
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
    """per_word: operands of each word but itself and the base address."""
    return ",".join(["=&r"] * n + ["l"] * n + ["r"] * per_word * n)


@gluon.jit
def receive(ptr, words, flag, N: gl.constexpr, IS_SHARED: gl.constexpr = False):
    """The numbers that other programs store at `ptr + words`, N of a thread, as soon as all are flagged."""
    return gl.inline_asm_elementwise(
        waiting_load(N, IS_SHARED, False), constraints(N, 2), [ptr, words, flag], dtype=gl.float32, is_pure=False,
        pack=N,
    )  # fmt: skip


@gluon.jit
def ask(ptr, words, N: gl.constexpr):
    """Load the numbers at `ptr + words`, flagged or not, N of a thread: for `receive_asked`, after other work."""
    return gl.inline_asm_elementwise(
        asking_load(N), constraints(N, 1), [ptr, words], dtype=gl.int32, is_pure=False, pack=N
    )


@gluon.jit
def receive_asked(asked, ptr, words, flag, N: gl.constexpr):
    """Return what `receive` does, from words that were asked for before."""
    return gl.inline_asm_elementwise(
        waiting_load(N, False, True), constraints(N, 3), [ptr, words, flag, asked], dtype=gl.float32, is_pure=False,
        pack=N,
    )  # fmt: skip


@gluon.jit
def ask_for_piece(ptr, K, PADDED: gl.constexpr):
    """Ask for K words, PADDED at most, for `receive_piece`."""
    ks = gl.arange(0, PADDED, VECTOR)
    return ask(ptr, gl.where(ks < K, ks, ks % 4), PADDED // 256)


@gluon.jit
def receive_piece(asked, ptr, flag, K, PADDED: gl.constexpr):
    """Return what `receive_vector` does, from words that were asked for before."""
    ks = gl.arange(0, PADDED, VECTOR)
    x = receive_asked(asked, ptr, gl.where(ks < K, ks, ks % 4), flag, PADDED // 256)
    return gl.where(ks < K, x, 0.0)


@gluon.jit
def flagged(numbers, flag):
    """float32 numbers as words with the flag."""
    return (numbers.to(gl.int32, bitcast=True) & -2) | flag


@gluon.jit
def receive_vector(ptr, flag, K, PADDED: gl.constexpr):
    """(PADDED,), zeros beyond K, a part for each thread."""
    ks = gl.arange(0, PADDED, VECTOR)
    inside = gl.where(ks < K, ks, ks % 4)
    return gl.where(ks < K, receive(ptr, inside, flag, PADDED // 256), 0.0)


@gluon.jit
def load_vector(ptr, K: gl.constexpr):
    """Load bfloat16 that no program writes, as `receive_vector` does."""
    ks = gl.arange(0, triton.next_power_of_2(K), VECTOR)
    at = gl.max_contiguous(gl.multiple_of(ptr + ks, [8]), [4])
    return gl.load(at, mask=ks < K, other=0.0).to(gl.float32)


@gluon.jit
def store_vector(ptr, x, K: gl.constexpr):
    """K numbers of what `load_vector` and `receive_vector` return, as bfloat16."""
    ks = gl.arange(0, triton.next_power_of_2(K), VECTOR)
    gl.store(gl.max_contiguous(gl.multiple_of(ptr + ks, [8]), [4]), x.to(gl.bfloat16), mask=ks < K)
