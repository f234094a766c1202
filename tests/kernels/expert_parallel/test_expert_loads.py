from __future__ import annotations

import torch

from kernels.gpu.expert_parallel.expert_loads import count_choices


def test_equals_the_reference(device: torch.device) -> None:
    """Shared experts and rows without a slot are not counted; counts are added to earlier loads."""
    num_tokens, num_experts = 300, 7
    experts = torch.stack([torch.randperm(num_experts)[:3] for _ in range(num_tokens)])
    chosen = torch.cat([experts, torch.tensor([7, 8]).expand(num_tokens, -1)], dim=1).int().to(device)
    slots = torch.randint(-1, 2, (num_tokens + 4,), dtype=torch.int32)
    before = torch.arange(num_experts)
    loads = before.clone().to(device)
    count_choices(chosen, slots.to(device), loads)
    counted = experts[slots[:num_tokens] >= 0]
    assert 0 < counted.shape[0] < num_tokens
    assert torch.equal(loads.cpu(), before + torch.bincount(counted.flatten(), minlength=num_experts))
