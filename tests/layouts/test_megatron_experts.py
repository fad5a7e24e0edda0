"""`te_offload.megatron.GroupedMLP` by itself, beside the experts that Megatron-core makes for the same settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_offload.errors import ArgumentError, NotInstalledError, UnsupportedError
from te_offload.fused import hopper
from tests.support.megatron_model import EXPERTS, FFN, HIDDEN, groups, make_config, quietly

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")

ROWS, SPLITS = 12, [5, 0, 4, 3]
SHAPES: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "with biases": {"add_bias_linear": True},
    "not gated": {"activation_func": "squared_relu", "gated_linear_unit": False},
    "in a latent space": {"moe_latent_size": 64},
}


@pytest.fixture(autouse=True)
def rank(tmp_path: Path) -> Iterator[None]:
    with groups(tmp_path / "meeting", "cpu"):
        yield


def config_of(**settings: Any) -> Any:
    from megatron.core import activations

    if isinstance(settings.get("activation_func"), str):
        settings["activation_func"] = getattr(activations, settings["activation_func"])
    return make_config("cpu", **{"bias_dropout_fusion": False, **settings})


def ours(config: Any, **keywords: Any) -> Any:
    from te_offload.megatron import GroupedMLP

    torch.manual_seed(5)
    return GroupedMLP(EXPERTS, config, **keywords)


def theirs(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron-core's `TEGroupedMLP`, which can be made on a CPU, and not run."""
    with quietly():
        from megatron.core.extensions import transformer_engine as te_modules
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import TEGroupedMLP

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.manual_seed(5)
    linears = MLPSubmodules(
        linear_fc1=te_modules.TEColumnParallelGroupedLinear, linear_fc2=te_modules.TERowParallelGroupedLinear
    )
    return TEGroupedMLP(EXPERTS, config, linears, ProcessGroupCollection.use_mpu_process_groups())


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_have_names_shapes_numbers_and_marks_of_megatron_cores(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(**SHAPES[shape])
    mine, expected = dict(ours(config).named_parameters()), dict(theirs(config, monkeypatch).named_parameters())
    assert set(mine) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(mine[name], parameter) and mine[name].dtype is parameter.dtype, name
        assert vars(parameter).items() <= vars(mine[name]).items(), name
    assert all(parameter.tensor_model_parallel for parameter in mine.values())  # else norms leave out ranks' experts


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
@pytest.mark.parametrize("of_layers", [(), ((0, 1, 3),)], ids=["", "of layers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shards_in_checkpoints_are_those_of_megatron_cores(
    shape: str, of_layers: Any, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.mapping import apply_factories

    def shards(module: Any) -> set[str]:
        state = module.sharded_state_dict("mlp.", of_layers, {"singleton_local_shards": apart})
        apply_factories(state)
        described = set()
        for name, shard in state.items():
            for part in shard if isinstance(shard, list) else [shard]:
                where = {key: each for key, each in vars(part).items() if key not in ("data", "local_data")}
                described.add(re.sub(r"<[^>]*>", "", f"{name}: {where}"))
        return described

    config = config_of(**SHAPES[shape])
    expected = shards(theirs(config, monkeypatch))
    assert expected and shards(ours(config)) == expected


def test_an_activation_that_is_to_be_computed_again_is_warned_of() -> None:
    config = config_of(recompute_granularity="selective", recompute_modules=["moe_act"])
    with pytest.warns(UserWarning, match="moe_act, which changes nothing here"):
        ours(config)
    ours(config_of(recompute_granularity="selective", recompute_modules=["layernorm"]))


def test_making_it_takes_no_random_numbers_but_for_its_weights() -> None:
    numbers = []
    for fills in (True, False):
        ours(config_of(perform_initialization=fills))
        numbers.append(torch.rand(3))
    torch.manual_seed(5)
    assert torch.equal(numbers[1], torch.rand(3)) and not torch.equal(*numbers)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_func": torch.nn.functional.gelu},
        {"activation_func": "squared_relu"},
        {"activation_func_clamp_value": 7.0},
        {"glu_linear_offset": 1.0},
        {"moe_apply_probs_on_input": True},
        {"activation_func_fp8_input_store": True},
        {"tensor_model_parallel_size": 2},
        {"init_model_with_meta_device": True},
    ],
    ids=str,
)
def test_settings_that_it_would_not_compute_are_refused_by_name(settings: dict[str, Any]) -> None:
    config = config_of()
    for name, value in settings.items():  # past checks of Megatron-core's own
        setattr(config, name, config_of(activation_func=value).activation_func if isinstance(value, str) else value)
    named = "expert_tensor_parallel_size=2" if "tensor_model_parallel_size" in settings else next(iter(settings))
    config.expert_tensor_parallel_size = settings.get("tensor_model_parallel_size", 1)
    with pytest.raises(UnsupportedError, match=named):
        ours(config)


def test_all_refused_settings_are_named_at_once() -> None:
    config = config_of(activation_func_fp8_input_store=True)
    config.fine_grained_activation_offloading, config.offload_modules = True, ["core_attn", "moe_act", "expert_fc1"]
    with pytest.raises(UnsupportedError, match=r"activation_func_fp8_input_store.*expert_fc1 and moe_act"):
        ours(config)
    config.activation_func_fp8_input_store, config.offload_modules = False, ["core_attn"]
    ours(config)


def test_without_megatron_core_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    monkeypatch.setitem(sys.modules, "megatron.core.fusions", None)
    with pytest.raises(NotInstalledError, match=r"Megatron-core, which is not installed: .*megatron.core.fusions"):
        ours(config)


def test_slots_that_stay_are_chosen_by_name() -> None:
    module = ours(config_of(), no_offload_activation=["act_input"])
    assert [op.no_offload_activation for op in module] == [False, True, False]
    with pytest.raises(ArgumentError, match=r"fc3_input, but slots are fc1_input, act_input, fc2_input"):
        ours(config_of(), no_offload_activation=["fc3_input"])


def test_keywords_go_to_the_ops() -> None:
    module = ours(config_of(), recompute_act_input=True, keep_quantized_weight=False)
    assert module.activation.recompute_act_input
    assert not module.linear_fc1.keep_quantized_weight and not module.linear_fc2.keep_quantized_weight
    assert ours(config_of(), act_input_dtype=torch.float8_e4m3fn).activation.act_input_dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("switch", ["0", "reference"], ids=["op by op", "fused"])
def test_wgrads_come_later_where_megatron_core_asks_for_that(
    switch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    at_once = ours(config_of(params_dtype=torch.float32, bf16=False))
    config = config_of(params_dtype=torch.float32, bf16=False)
    config.delay_wgrad_compute = True
    later = ours(config)
    x, probabilities = torch.randn(ROWS, HIDDEN), torch.rand(ROWS)
    for module in (at_once, later):
        y, bias = module(x, torch.tensor(SPLITS, dtype=dtype), probabilities)
        assert y.shape == (ROWS, HIDDEN) and bias is None
        y.square().sum().backward()
    assert all(parameter.grad is None for parameter in later.parameters())
    later.backward_dw()
    for one, other in zip(at_once.parameters(), later.parameters(), strict=True):
        assert one.grad is not None and one.shape[0] in (2 * FFN, HIDDEN) and torch.equal(one.grad, other.grad)


def test_a_state_dict_with_extra_states_of_megatron_cores_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    state = theirs(config, monkeypatch).state_dict()
    state |= {f"linear_fc1._extra_state{number}": torch.empty(0) for number in range(1, EXPERTS)}
    module = ours(config_of(perform_initialization=False))
    module.load_state_dict(state)
    assert all(torch.equal(parameter, state[name]) for name, parameter in module.named_parameters())
    del state["linear_fc2.weight2"]
    with pytest.raises(RuntimeError, match=r"Missing key.*linear_fc2.weight2"):
        module.load_state_dict(state)


def test_delayed_scalings_history_is_in_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil", reason="psutil is not installed here, which Megatron-core's checkpoints need")
    from megatron.core import dist_checkpointing

    from te_offload.ops import GroupedLinear

    history = {"linear_fc1": torch.arange(5, dtype=torch.uint8), "linear_fc2": torch.arange(7, dtype=torch.uint8)}
    saved, loaded = ours(config_of()), ours(config_of())
    for name, state in history.items():
        monkeypatch.setattr(getattr(saved, name), "get_extra_state", lambda state=state: state)
    dist_checkpointing.save(saved.sharded_state_dict("mlp."), str(tmp_path))
    found = dist_checkpointing.load(loaded.sharded_state_dict("mlp."), str(tmp_path))
    got: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(GroupedLinear, "set_extra_state", lambda op, state: got.update({op.out_features: state}))
    loaded.load_state_dict({name.removeprefix("mlp."): value for name, value in found.items()})
    assert torch.equal(got[2 * FFN], history["linear_fc1"]) and torch.equal(got[HIDDEN], history["linear_fc2"])
