"""Hooks of modules inside of a layer that is a graph of its own, a session's among them: no replay calls them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession
from te_offload.errors import ArgumentError
from te_offload.graphs import CaptureState, capture_layers
from tests.graphs.test_layer_graphs import batches, layers, run
from tests.support.gather_hooks import put_gathers
from tests.support.toy_layer import Machine, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def around(stack: Any) -> Any:
    return torch.nn.ModuleList(torch.nn.Sequential(layer) for layer in stack)


def test_a_session_that_is_attached_inside_of_a_layer_is_an_error_until_it_is_closed(machine: Machine) -> None:
    stack = layers(machine, 2, "slot")
    outer = around(stack)
    session = OffloadSession(stack)
    with pytest.raises(
        ArgumentError, match=r"layer0: an OffloadSession is attached to 0 inside of it, whose forward no"
    ):
        capture_layers(outer, session=session)
    session.close()
    with capture_layers(outer):
        pass


def test_a_session_that_nobody_has_any_more_is_none(machine: Machine) -> None:
    stack = layers(machine, 1, "slot")
    session = OffloadSession(stack)
    del session
    gc.collect()
    with capture_layers(around(stack)):
        pass


def test_a_session_that_is_attached_inside_later_keeps_the_layer_eager(machine: Machine) -> None:
    stack = layers(machine, 1, "slot")
    outer = around(stack)
    with capture_layers(outer, warmup=1, on_hooks="ignore") as graphs:
        session = OffloadSession(stack, min_bytes=0)
        for x in batches(3):
            with session.step():
                run(outer, x)
            assert session.records[-1].slots[0].fate is not Fate.KEPT and session.records[-1].bytes_out > 0
        scope = graphs.scopes["layer0"]
        assert scope.state is CaptureState.EAGER and "an OffloadSession is attached to 0 inside" in str(scope.reason)
        session.close()


def test_sessions_of_what_is_captured_and_of_what_encloses_it_are_none_inside(machine: Machine) -> None:
    stack = layers(machine, 1, "slot")
    (outer,) = around(stack)
    for attached, captured in ((outer, stack[0]), (outer, outer)):
        with (
            OffloadSession([attached], min_bytes=0) as session,
            capture_layers(captured, session=session, warmup=1) as graphs,
        ):
            for x in batches(3):
                with session.step():
                    outer(x).sum().backward()
            assert graphs.captured and session.records[-1].bytes_out > 0


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_inside_that_are_ignored_run_in_captures_alone_and_the_report_says_so(
    machine: Machine, kind: str
) -> None:
    stack = layers(machine, 1)
    outer, calls = around(stack), [0, 0]

    def count(place: int) -> None:
        calls[place] += 1

    getattr(stack[0], f"register_{kind}_hook")(lambda *_: count(0))
    if not kind.startswith("full"):  # with which torch keeps the layer's output, so that no replay may write it
        getattr(outer[0], f"register_{kind}_hook")(lambda *_: count(1))
    with capture_layers(outer, warmup=1, on_hooks="ignore") as graphs:
        for x in batches(4):
            outer[0](x.requires_grad_()).sum().backward()
        assert calls == [1 + 2, 0 if kind.startswith("full") else 4]  # warm-up, rehearsal, capture; and each time
        assert "hooks inside of it run at its capture, and not in replays: of 0" in graphs.report()
        assert graphs.captured


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_layers_run_eagerly_while_modules_inside_have_hooks(machine: Machine, kind: str) -> None:
    stack = layers(machine, 1)
    outer, calls = around(stack), list[None]()

    def step(x: torch.Tensor) -> None:
        outer[0](x.requires_grad_()).sum().backward()

    register = getattr(stack[0], f"register_{kind}_hook")
    handle = register(lambda *_: calls.append(None))
    first, *rest = batches(8)
    with capture_layers(outer, warmup=1) as graphs:
        scope = graphs.scopes["layer0"]
        step(first)  # warm-up
        for x in rest[:2]:
            step(x)
        assert len(calls) == 3 and scope.state is CaptureState.WARMING_UP
        handle.remove()
        for x in rest[2:4]:
            step(x)
        assert graphs.captured and scope.replays == 2
        handle = register(lambda *_: calls.append(None))
        step(rest[4])
        assert len(calls) == 4 and scope.replays == 2
        handle.remove()
        step(rest[5])
        assert len(calls) == 4 and scope.replays == 3
        assert dict(scope.eager) == {"modules inside of it have hooks, which no replay calls: 0": 3}


def test_a_layer_may_have_hooks_itself(machine: Machine) -> None:
    outer = around(layers(machine, 1))
    outer[0].register_forward_hook(lambda *_: None)
    with capture_layers(outer, warmup=1) as graphs:
        for x in batches(3):
            run(outer, x)
        assert graphs.captured and "hooks" not in graphs.report()


def gathers(stack: Any, calls: list[str], *, adds: float = 0.0) -> list[Any]:
    """On each layer a hook with which parameters are waited for. Their handles."""

    def wait(module: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(adds)
        calls.append(type(module).__name__)

    return put_gathers(stack, wait)


@pytest.mark.parametrize("on_hooks", ["eager", "ignore"])
def test_megatrons_waits_for_parameters_are_called_before_each_replay(machine: Machine, on_hooks: str) -> None:
    eager, stack = layers(machine, 2), layers(machine, 2)
    calls: list[str] = []
    handles = gathers(stack, calls)
    with capture_layers(around(stack), warmup=1, on_hooks=on_hooks) as graphs:
        outer = torch.nn.ModuleList(scope.module for scope in graphs.scopes.values())
        for number, x in enumerate(batches(6)):
            before = len(calls)
            assert torch.equal(run(eager, x), run(outer, x))
            if number == 1:  # before the capture, in its rehearsal, and in it
                assert len(calls) - before == 2 * 3
            else:
                assert len(calls) - before == 2
        assert graphs.captured and [scope.replays for scope in graphs.scopes.values()] == [5, 5]
        assert "hooks" not in graphs.report()
        for handle in handles:
            handle.remove()
        before = len(calls)
        run(outer, batches(1)[0])
        assert len(calls) == before and [scope.replays for scope in graphs.scopes.values()] == [6, 6]


def test_replays_read_the_parameters_that_megatrons_hooks_have_waited_for(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    (outer,) = around(stack)
    with capture_layers(outer, warmup=1) as graphs:
        for x in batches(3):
            assert torch.equal(eager[0](x), outer(x))
        gathers(stack, [], adds=0.5)
        gathers(eager, [], adds=0.5)
        for x in batches(2):
            found, expected = outer(x), eager[0](x)
            assert torch.equal(found, expected)
            del found
        assert graphs.scopes["layer0"].replays == 4


def test_another_hook_beside_megatrons_keeps_the_layer_eager(machine: Machine) -> None:
    stack = layers(machine, 1)
    (outer,) = around(stack)
    calls: list[str] = []
    gathers(stack, calls)
    with capture_layers(outer, warmup=1) as graphs:
        first, second, third, *rest = batches(5)
        outer(first).sum().backward()
        handle = stack[0].register_forward_pre_hook(lambda *_: None)
        outer(second).sum().backward()
        assert len(calls) == 2 and graphs.scopes["layer0"].replays == 0
        handle.remove()
        outer(third).sum().backward()
        assert graphs.captured
        stack[0].register_forward_hook(lambda *_: None)
        before = len(calls)
        for x in rest:
            outer(x).sum().backward()
        assert len(calls) == before + 2 and graphs.scopes["layer0"].replays == 1
        assert dict(graphs.scopes["layer0"].eager) == {"modules inside of it have hooks, which no replay calls: 0": 3}


def test_hooks_of_all_modules_keep_layers_with_modules_inside_eager(machine: Machine) -> None:
    calls: list[str] = []
    stack = layers(machine, 1)
    (outer,) = around(stack)
    alone = layers(machine, 1)[0]
    with capture_layers([outer, alone], warmup=1) as graphs:
        scopes = graphs.scopes
        for x in batches(2):
            outer(x).sum().backward()
            alone(x).sum().backward()
        handle = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: calls.append(type(module).__name__)
        )
        try:
            for x in batches(2):
                outer(x).sum().backward()
                alone(x).sum().backward()
        finally:
            handle.remove()
        assert calls == ["Sequential", "Toy", "Toy"] * 2
        assert [scope.replays for scope in scopes.values()] == [1, 3]
        (why,) = scopes["layer0"].eager
        assert why.endswith("no replay calls: all modules, by torch.nn.modules.module.register_module_...")


def test_unknown_way_to_take_hooks_is_an_error(machine: Machine) -> None:
    with pytest.raises(ArgumentError, match="on_hooks must be one of eager, ignore, but is 'raise'"):
        capture_layers(layers(machine, 1), on_hooks="raise")
