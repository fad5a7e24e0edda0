"""The repository and what is built from it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
needs_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")


def tool(*arguments: str, cwd: Path = ROOT) -> str:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed here")
    folder = tmp_path_factory.mktemp("dist")
    tool("hatchling", "build", "-d", str(folder))
    return folder


def wheel_names(built: Path) -> list[str]:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        return wheel.namelist()


def test_links_show_the_rooms_at_the_top() -> None:
    for name in ("ops", "fused"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == ROOT / "te_offload" / name


def test_links_are_in_no_wheel_and_no_sdist(built: Path) -> None:
    top = {name.split("/")[0] for name in wheel_names(built)}
    assert top == {"te_offload", "te_offload-0.1.0.dist-info"}
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        assert not [name for name in sdist.getnames() if re.match(r"[^/]+/(ops|fused)(/|$)", name)]


def test_wheel_holds_every_module_and_the_licence(built: Path) -> None:
    names = wheel_names(built)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "te_offload").rglob("*.py")}
    assert modules <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_links_are_not_seen_twice_by_pytest_ruff_or_mypy() -> None:
    pytest.importorskip("ruff", reason="ruff is not installed here")
    files = tool("ruff", "check", "--show-files").splitlines()
    inside = [Path(file).relative_to(ROOT).parts[0] for file in files]
    assert "te_offload" in inside and "ops" not in inside and "fused" not in inside
    collected = [line for line in tool("pytest", "--collect-only", "-q").splitlines() if "::" in line]
    assert len(collected) > 100 and all(line.startswith("tests/") for line in collected)
    pytest.importorskip("mypy", reason="mypy is not installed here")
    sources = (
        "from mypy.main import process_options; print(*[source.path for source in process_options([])[0]], sep='\\n')"
    )
    result = subprocess.run([sys.executable, "-c", sources], cwd=ROOT, capture_output=True, text=True, check=True)
    checked = {Path(line).parts[0] for line in result.stdout.splitlines()}
    assert checked == {"te_offload", "tests", "benchmarks", "examples"}


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.11.0a0+nv25.9"), ("transformer-engine", "2.20.0+8d2c7f1"), ("transformer-engine", "2.20.2.dev0")],
)
def test_installed_torch_and_transformer_engine_meet_the_requirements(built: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        metadata = wheel.read("te_offload-0.1.0.dist-info/METADATA").decode()
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    requirements = {requirement.name: requirement for requirement in map(Requirement, lines)}
    assert requirements[name].specifier.contains(version, prereleases=True)
    assert not requirements[name].extras


def test_wheel_works_away_from_the_checkout(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, 'site'); import te_offload, torch; from te_offload import ops\n"
        "assert 'site' in te_offload.__file__, te_offload.__file__\n"
        "y = ops.GroupedLinear(2, 4, 4, device='cpu')(torch.ones(3, 4), torch.tensor([1, 2]))\n"
        "print(tuple(y.shape))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "(3, 4)", result.stderr


@needs_checkout
def test_no_file_names_a_registry_host_or_a_machine_path() -> None:
    hosts = re.compile(
        r"(pypi|pythonhosted)\." + r"(org|io)|index-" + r"url|find-" + r"links|/ro" + r"ot/|/wo" + r"rk/"
    )
    for path in tracked():
        if path.is_file() and not path.is_symlink() and path.suffix not in (".png",):
            found = hosts.search(path.read_text(errors="ignore"))
            assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


def test_every_log_that_a_page_refers_to_is_there_with_the_parts_that_it_names() -> None:
    reference = re.compile(r"\]\(([^)\s]+\.log)\)(?:, parts? (\d+)(?: (?:and|to) (\d+))?)?")
    found = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for log, *parts in reference.findall(page.read_text()):
            text = (page.parent / log).read_text()
            assert text.strip(), f"{page.name} refers to {log}, which is empty"
            for part in filter(None, parts):
                found += 1
                known = re.search(rf"(?mi)\bpart {part}\b|^(?:#|==) {part}\.", text)
                assert known, f"{page.name} refers to part {part} of {log}, which has none"
    assert found > 10


@needs_checkout
def test_no_lock_file_is_tracked() -> None:
    assert not [path for path in tracked() if path.name in ("uv.lock", "poetry.lock", "pdm.lock")]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_only_the_adapter_knows_private_names_of_transformer_engine() -> None:
    public = {"transformer_engine.pytorch", "transformer_engine.common.recipe", "transformer_engine.common.recipe.*"}
    for path in (ROOT / "te_offload").rglob("*.py"):
        if path.parent.name == "te_adapter":
            continue
        private = {name for name in imports(path) if name.startswith("transformer_engine")} - public
        private -= {"transformer_engine.common.recipe"}
        assert not private, f"{path.relative_to(ROOT)} imports {private}"


ROOMS = {
    "te_offload/slots.py": set(),
    "te_offload/errors.py": set(),
    "te_offload/ops": {"slots", "errors", "ops"},
    "te_offload/fused": {"slots", "errors", "ops", "fused"},
    "te_offload/offload": {"slots", "errors", "units", "ops", "fused", "offload", "report"},
    "te_offload/graphs": {"slots", "errors", "units", "ops", "offload", "graphs"},
    "te_offload/megatron.py": {"errors", "ops"},
    "te_offload/functional.py": {"errors", "fused"},
    "te_offload/torchtitan.py": {"errors", "ops", "fused", "functional"},
    "te_offload/report": {"slots", "units", "fused", "offload", "report"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_data_flows_one_way_between_the_rooms(room: str) -> None:
    start = ROOT / room
    for path in [start] if start.is_file() else start.rglob("*.py"):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("te_offload.")}
        assert ours <= ROOMS[room], f"{path.relative_to(ROOT)} imports {ours - ROOMS[room]}"


@pytest.mark.parametrize("module", ["slots.py", "errors.py", "ops/arithmetic.py"])
def test_vocabulary_and_arithmetic_do_not_touch_cuda(module: str) -> None:
    assert "torch.cuda" not in (ROOT / "te_offload" / module).read_text()


def test_every_module_opens_with_what_goes_in_and_out() -> None:
    for path in (ROOT / "te_offload").rglob("*.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path.name in ("__main__.py",) or "Holds no" in text:
            continue
        for word in ("In:", "Out:", "Keeps", "Does"):
            assert word in text, f"{path.relative_to(ROOT)} does not say {word}"


def test_each_tensor_says_its_device_whatever_the_default_one_is() -> None:
    makers = {name for name in dir(torch) if re.match("(as_?tensor|empty|zeros|ones|full|arange|tensor|rand)", name)}
    makers -= {name for name in makers if name.endswith("_like")}
    for path in (ROOT / "te_offload").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            room, _, made = ast.unparse(call.func).rpartition(".")
            if room == "torch" and made in makers:
                given = {keyword.arg for keyword in call.keywords}
                assert given & {"device", None}, f"{path.relative_to(ROOT)}:{call.lineno}: {made} says no device"


def test_no_module_is_longer_than_500_lines() -> None:
    for path in [*(ROOT / "te_offload").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 500, path
