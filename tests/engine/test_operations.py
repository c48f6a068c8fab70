"""What runs inside a piece of a training is counted as what it is."""

from __future__ import annotations

import pytest
import torch

from autotune.engine.operations import refuses_to_be_watched, watched_operations

DENSE = torch.rand(30, 5)


def make_sparse() -> torch.Tensor:
    return torch.eye(40, 30).to_sparse()  # 30 values that are not zero


def test_a_dense_product_counts_two_operations_for_each_pair() -> None:
    with watched_operations() as seen:
        torch.mm(torch.rand(40, 30), DENSE)
        torch.addmm(torch.rand(5), torch.rand(40, 30), DENSE)
    assert seen.flops == 2 * (2 * 40 * 30 * 5)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_product_counts_its_values_alone(layout: str) -> None:
    sparse = make_sparse() if layout == "coo" else make_sparse().to_sparse_csr()
    with watched_operations() as seen:
        torch.spmm(sparse, DENSE)
    assert seen.flops == 2 * 30 * 5


def test_so_does_its_backward_pass() -> None:
    weight = torch.rand(30, 5, requires_grad=True)
    with watched_operations() as seen:
        torch.spmm(make_sparse(), weight).sum().backward()
    assert seen.flops == 2 * (2 * 30 * 5)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_what_fails_only_because_it_is_watched_is_known_as_such() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    query = torch.randn(1, 2, 16, 16)
    with watched_operations(), pytest.raises((RuntimeError, TypeError)) as caught:
        flex.flex_attention(query, query, query)
    assert refuses_to_be_watched(caught.value)
    assert not refuses_to_be_watched(RuntimeError("shapes do not match"))
