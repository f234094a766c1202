"""Draws the events that `decode_profile --out` kept: the device's work above the host's runtime calls.

python -m benchmarks.profile.decode_picture decode_1.json docs/img/decode_step.png    (needs matplotlib)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib import pyplot


def main(source: str, target: str) -> None:
    kept = json.loads(Path(source).read_text())
    figure, axes = pyplot.subplots(figsize=(14, 3.2))
    shown: set[str] = set()
    for kind, name, start, duration in kept["events"]:
        on_device = kind not in ("cuda_runtime", "cuda_driver")
        label = "kernels and copies" if on_device else name
        color = "tab:blue" if on_device else f"C{1 + sum(name.encode()) % 8}"
        axes.broken_barh(
            [(start, duration)], (1.1 if on_device else 0, 0.9), color=color, label="" if label in shown else label
        )
        shown.add(label)
    axes.set_yticks([0.45, 1.55], ["host", "device"])
    axes.set_xlabel(f"microseconds; a step takes {kept['step_us']:.0f} while profiled")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=6, fontsize=7, frameon=False)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main(*sys.argv[1:])
