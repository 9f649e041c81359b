"""Biases of keys as columns of keys and queries, against their definition."""

from __future__ import annotations

import pytest
import torch

from manta.workers.decoders.key_bias import Alibi, with_key_bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widened_heads_give_scaled_products_and_bias(dtype: torch.dtype) -> None:
    """At the longest context of any published model with ALiBi, and with slopes that bfloat16 cannot hold."""
    num_heads, head_dim, width, scale = 6, 40, 48, 40**-0.5
    slopes = 2.0 ** -torch.arange(0.3, num_heads)
    bias = slopes[:, None] * torch.arange(65536)
    positions = torch.tensor([0, 1, 2, 255, 256, 257, 4095, 40_001, 65_535])
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, num_heads, len(positions), head_dim).to(dtype)
    wide = Alibi(bias, width, torch.device("cpu")).widen(query, key, value, positions, scale)
    assert all(each.dtype == dtype and each.shape == (1, num_heads, len(positions), width) for each in wide)
    actual = wide[0].double() @ wide[1].double().transpose(-1, -2) * scale
    expected = query.double() @ key.double().transpose(-1, -2) * scale + bias.double()[:, None, positions]
    torch.testing.assert_close(actual, expected, rtol=2e-7, atol=2e-5)
    assert torch.equal(wide[2][..., :head_dim], value)
    assert not wide[2][..., head_dim:].any()


def test_queries_that_share_a_key_head_share_its_bias() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    bias = torch.randn(2, 5)
    wide_query, wide_key, _ = with_key_bias(query, key, value, bias, scale=0.25, width=32)
    actual = wide_query @ wide_key.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.25
    products = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.25
    torch.testing.assert_close(actual, products + bias.repeat_interleave(2, dim=0)[:, None], rtol=1e-5, atol=1e-5)
