"""Each op is its te.ops class plus one keyword."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops
from te_offload.errors import ArgumentTypeError, UnsupportedReleaseError
from te_offload.ops import te_adapter
from tests.support.mlp import make_mlp, run

LINEAR: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
CASES = {
    "GroupedLinear": ((3, 16, 32), LINEAR),
    "ScaledSReLU": ((), {"activation_recompute_in_mlp": True}),
    "ScaledTanhSReLU": ((), {"tanh_clamp_scale": 3.0}),
    "ScaledSwiGLU": ((32,), {}),
    "ScaledClampedQGeGLU": ((), {"limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5, "glu_interleave_size": 8}),
    "ScaledSiTUGLU": ((), {"beta1": 3.0, "beta2": 20.0}),
}
EACH = pytest.mark.parametrize("name", CASES)


def make(name: str, **arguments: Any) -> Any:
    positional, keywords = CASES[name]
    return getattr(ops, name)(*positional, **keywords, **arguments)


def test_room_exports_exactly_the_six_ops() -> None:
    assert sorted(ops.__all__) == sorted(CASES)


@EACH
def test_is_a_subclass_with_the_same_parameters_and_attributes(name: str) -> None:
    positional, keywords = CASES[name]
    plain = getattr(te.ops, name)(*positional, **keywords)
    ours = make(name, no_offload_activation=True)
    assert isinstance(ours, type(plain))
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [(n, p.shape, p.dtype) for n, p in ours.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in plain.named_parameters()
    ]
    for key, value in vars(plain).items():
        if isinstance(value, (bool, int, float)):
            assert getattr(ours, key) == value, key


@EACH
def test_positional_arguments_of_the_te_ops_class_keep_their_places(name: str) -> None:
    def positional(cls: type) -> list[str]:
        parameters = inspect.signature(cls).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    assert positional(getattr(ops, name)) == positional(getattr(te.ops, name))


@EACH
def test_unknown_argument_is_refused_as_by_te_ops(name: str) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        make(name, no_such_argument=1)


@EACH
@pytest.mark.parametrize("value", [1, None, "yes", torch.tensor(True)], ids=["int", "none", "text", "tensor"])
def test_argument_that_is_no_bool_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{name}: no_offload_activation must be True or False"):
        make(name, no_offload_activation=value)


@EACH
@pytest.mark.parametrize("value", [False, True])
def test_argument_survives_deepcopy_and_pickle_and_shows_in_repr(name: str, value: bool) -> None:
    op = make(name, no_offload_activation=value)
    for other in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert other.no_offload_activation is value
        assert f"no_offload_activation={value}" in repr(other)
        assert type(other) is type(op)


@EACH
def test_default_is_to_let_the_slot_go(name: str) -> None:
    assert make(name).no_offload_activation is False


def test_state_dict_of_te_ops_loads_into_ours_and_back() -> None:
    plain = te.ops.GroupedLinear(3, 16, 32, **LINEAR)
    ours = make("GroupedLinear")
    ours.load_state_dict(plain.state_dict())
    assert torch.equal(ours.weight2, plain.weight2)
    plain.load_state_dict(ours.state_dict())


def test_copy_of_an_attached_layer_is_not_attached() -> None:
    module = make_mlp()
    with OffloadSession(module, min_bytes=0) as session:
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with session.step():
                run(copied, (4, 0, 6))
            assert session.records[-1].slots == ()
        with session.step():
            run(module, (4, 0, 6))
        assert session.records[-1].bytes_out > 0


@pytest.mark.parametrize("version", ["2.17.1", "2.21.0", "3.20.0", "nonsense"])
def test_release_without_a_row_is_a_named_error(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(te_adapter.layouts, "installed_version", lambda: version)
    with pytest.raises(UnsupportedReleaseError, match=f"Transformer Engine {version} is not supported.*2.20.x"):
        make("ScaledSReLU")
    with pytest.raises(UnsupportedReleaseError):
        OffloadSession(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["2.20.0", "2.20.2", "2.20.0+8d2c7f1", "2.20.0.dev0"])
def test_release_of_the_series_is_supported(version: str) -> None:
    assert te_adapter.require_supported_release(version).series == (2, 20)
