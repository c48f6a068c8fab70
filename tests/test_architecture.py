"""The layers, the lazy import, a knob's four places and the size of things, read from the source."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter

import pytest
from exported_source import CHANGED, PLAIN
from layers import (
    LAYERS,
    ROOT,
    SOURCES,
    Import,
    draw,
    find_imports,
    find_trees,
    home_of,
    is_below,
    list_imports,
    read_imports,
)

import autotune
from autotune.emit.export import EXPORTERS, Request
from autotune.knobs import KNOBS
from autotune.records import TrainConfig

FIELDS = tuple(TrainConfig.model_fields)

SAME_ROW = {
    ("autotune.units", "autotune.errors"): "a duration that does not parse is the user's error",
    ("autotune.space", "autotune.knobs"): "the space is the table applied to one target",
    ("autotune.knobs", "autotune.arithmetics"): "a row of the table asks which arithmetic is worth trying",
    ("autotune.space", "autotune.arithmetics"): "and the space what could not be told of it",
}

ONLY_IN = {
    "pynvml": ("autotune.machine.nvml",),
    "psutil": ("autotune.isolation", "autotune.machine"),
    "optuna": ("autotune.search",),
    "sqlalchemy": ("autotune.search.share.address",),
    "pydantic": ("autotune.records",),
    "typer": ("autotune.cli",),
    "click": (),  # typer brings its own
    "rich": ("autotune.cli",),
    "jinja2": ("autotune.emit",),
}
"""Packages and the modules that may import them."""

TORCH_FREE = (
    "autotune.arguments",
    "autotune.arithmetics",
    "autotune.cli",
    "autotune.drift.compare",
    "autotune.drift.gate",
    "autotune.drift.guard.check_schedule",
    "autotune.drift.guard.loss_rise",
    "autotune.drift.guard.loss_watch",
    "autotune.drift.record.trace_file",
    "autotune.emit",
    "autotune.engine.allocator",
    "autotune.errors",
    "autotune.explain",
    "autotune.format",
    "autotune.isolation.endings",
    "autotune.isolation.keeper",
    "autotune.isolation.process",
    "autotune.isolation.channel.progress",
    "autotune.isolation.runner",
    "autotune.isolation.warm.process",
    "autotune.isolation.warm.servers",
    "autotune.knobs",
    "autotune.lifeline",
    "autotune.lock",
    "autotune.machine",
    "autotune.machine.limits.cache",
    "autotune.measure.confidence",
    "autotune.measure.hopeless",
    "autotune.measure.racing",
    "autotune.measure.student_t",
    "autotune.measure.warmup",
    "autotune.presets",
    "autotune.probe.analysis",
    "autotune.probe.run",
    "autotune.probe.time_shares",
    "autotune.records",
    "autotune.scratch",
    "autotune.search",
    "autotune.sentences",
    "autotune.space",
    "autotune.targets.drift_limits",
    "autotune.targets.resolve",
    "autotune.targets.workload",
    "autotune.train.runs.compare",
    "autotune.train.runs.folder",
    "autotune.train.options",
    "autotune.train.policy",
    "autotune.train.recovery",
    "autotune.train.report",
    "autotune.train.script",
    "autotune.train.settings",
    "autotune.units",
    "autotune.user_cache",
    "autotune.version",
)
"""The parent's side: it must not pay for torch, and never initialise a device."""

TORCH_BELOW = ("autotune.machine.limits", "autotune.train.script.entry", "autotune.train.script.launcher")
"""Parts of these that run in a child process."""

GLOBAL_STATE_IN = ("autotune.engine", "autotune.drift.record.numerics")
"""The second switches to the baseline's numerics for one gradient, and back."""

GLOBAL_SETTERS = {
    "set_num_threads",
    "set_num_interop_threads",
    "set_float32_matmul_precision",
    "set_default_dtype",
    "set_default_device",
    "use_deterministic_algorithms",
    "enable_flash_sdp",
    "enable_math_sdp",
    "sdpa_kernel",
}

LONGEST_FUNCTION = 40
LONG_FUNCTIONS = {
    "autotune.cli.search.search": "its parameters are the command's flags, each with its help",
    "autotune.cli.train.train": "the same",
}
MOST_MEMBERS = 12
"""Modules and sub-packages of one package."""
LARGE_PACKAGES = {
    "autotune": "the rooms themselves, and leaves that all of them use",
    "autotune.engine": "a knob each",
    "autotune.records": "a record each",
    "autotune.search": "its stages, and what they work on",
}


def test_the_picture_is_up_to_date() -> None:
    picture = (ROOT.parent / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert picture == draw(), "run: python tests/layers.py > docs/architecture.svg"


def test_no_module_imports_itself_by_way_of_others() -> None:
    needed_by = {
        module: {found.target for found in find_imports()[module] if not found.for_types} for module in SOURCES
    }
    targets = {module: needed & SOURCES.keys() for module, needed in needed_by.items()}
    while leaves := [module for module, needed in targets.items() if not needed - {"autotune"}]:
        for module in leaves:
            del targets[module]
        targets = {module: needed - {*leaves} for module, needed in targets.items()}
    assert targets == {}


def test_every_module_has_a_row_of_its_own() -> None:
    top_level = {".".join(name.split(".")[:2]) for name in SOURCES}
    assert top_level - LAYERS.keys() == set()
    assert LAYERS.keys() - SOURCES.keys() == set()


def test_imports_are_read_right() -> None:
    program = (
        "import a\nif TYPE_CHECKING:\n    from b import c\ndef f():\n    from autotune.runs import learning, timing\n"
    )
    assert list(read_imports(ast.parse(program))) == [
        Import("a", for_types=False, lazy=False),
        Import("b", for_types=True, lazy=False),
        Import("autotune.runs.learning", for_types=False, lazy=True),
        Import("autotune.runs.timing", for_types=False, lazy=True),
    ]


def test_a_module_imports_only_from_rows_above_its_own() -> None:
    offenders = []
    for module, found in list_imports():
        if not is_below(found.target, "autotune") or found.target == "autotune.__version__":
            continue
        home, other = home_of(module), home_of(found.target)
        if other != home and LAYERS[other] >= LAYERS[home] and (home, other) not in SAME_ROW:
            offenders.append(f"{module} (row {LAYERS[home]}) imports {found.target} (row {LAYERS[other]})")
    assert offenders == []


def test_the_exceptions_are_all_in_use() -> None:
    pairs = {(home_of(module), home_of(found.target)) for module in SOURCES for found in find_imports()[module]
             if is_below(found.target, "autotune")}  # fmt: skip
    assert SAME_ROW.keys() <= pairs


def test_a_package_is_imported_only_where_it_belongs() -> None:
    offenders = []
    for module, found in list_imports():
        places = ONLY_IN.get(found.target.partition(".")[0])
        if places is not None and not found.for_types and not any(is_below(module, place) for place in places):
            offenders.append(f"{module} imports {found.target}")
    assert offenders == []


def list_torch_free() -> list[str]:
    """Return the modules whose longest prefix in the two tables is in the first of them."""
    tables = (*TORCH_FREE, *TORCH_BELOW)
    longest = {module: max((one for one in tables if is_below(module, one)), key=len, default="") for module in SOURCES}
    return [module for module, prefix in longest.items() if prefix in TORCH_FREE]


def test_the_parents_side_names_no_torch() -> None:
    modules = list_torch_free()
    assert [prefix for prefix in TORCH_FREE if not any(is_below(module, prefix) for module in modules)] == []
    offenders = []
    for module in modules:
        named = [found for found in find_imports()[module] if is_below(found.target, "torch") and not found.for_types]
        if is_below(module, "autotune.cli"):
            named = [found for found in named if not found.lazy]
        offenders += [module] if named else []
    assert offenders == []


def test_the_leaves_are_imported_by_the_ways_in_only() -> None:
    users = {
        module
        for module in SOURCES
        for found in find_imports()[module]
        if is_below(found.target, "autotune.emit") and not is_below(module, "autotune.emit")
    }
    places = ("autotune.api", "autotune.cli", "autotune.hf", "autotune.lightning")
    assert [module for module in users if not any(is_below(module, place) for place in places)] == []


def run_python(program: str) -> str:
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


HEAVY = "[name for name in ('torch', 'optuna', 'numpy', 'sqlalchemy') if name in sys.modules]"


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert run_python(f"import sys, autotune; print({HEAVY})") == "[]\n"


@pytest.mark.slow_cases("arguments1", "arguments4")
@pytest.mark.parametrize("arguments", [[], ["probe"], ["search"], ["train"], ["compare"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        f"import runpy, sys\nsys.argv = ['autotune', *{arguments!r}, '--help']\n"
        "try:\n    runpy.run_module('autotune', run_name='__main__')\n"
        f"except SystemExit as stop:\n    print('exit', stop.code, {HEAVY})\n"
    )
    printed = run_python(program)
    assert "Usage: autotune" in printed
    assert printed.endswith("exit 0 []\n")


def test_the_parents_side_imports_no_torch_at_second_hand() -> None:
    modules = sorted(list_torch_free())
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name + ' brings torch')\n"
    )
    run_python(program)


def test_every_public_name_is_there_and_loads_lazily() -> None:
    assert autotune.__all__ == sorted(autotune.__all__)
    assert {*autotune.__all__} == {*autotune._HOME, "__version__"}
    names_for_types = {
        alias.name
        for node in ast.walk(find_trees()["autotune"])
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    } - {"TYPE_CHECKING", "Any", "VERSION"}
    assert names_for_types == {*autotune._HOME}
    for name, home in autotune._HOME.items():
        assert getattr(autotune, name) is getattr(importlib.import_module(home), name)
        assert f"autotune.{name}" not in SOURCES  # no function shares its name with a module
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        autotune.nothing  # noqa: B018


def declared_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def kind_and_name(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_all_is_sorted_and_complete() -> None:
    declared = {module: names for module, tree in find_trees().items() if (names := declared_names(tree)) is not None}
    del declared["autotune"]
    for module, names in declared.items():
        assert names == sorted(names, key=kind_and_name)
        loaded = importlib.import_module(module)
        assert [name for name in names if not hasattr(loaded, name)] == []
    tree = find_trees()["autotune.records"]  # the one package whose names are imported from it
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*declared["autotune.records"]} == imported


def test_global_state_of_torch_is_set_where_it_belongs() -> None:
    for module, tree in find_trees().items():
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            targets = node.targets if isinstance(node, ast.Assign) else []
            sets_backend = any(ast.unparse(target).startswith("torch.backends.") for target in targets)
            if name in GLOBAL_SETTERS or sets_backend:
                assert any(is_below(module, place) for place in GLOBAL_STATE_IN), (
                    f"{module}:{node.lineno} changes torch's global state"
                )


def test_every_knob_has_a_row_of_the_table() -> None:
    rows = [knob.field for knob in KNOBS]
    assert len(rows) == len(set(rows))
    assert {*rows} == {*FIELDS} - {"user_knobs"}  # those have their values from the workload


def read_from_config(tree: ast.AST) -> set[str]:
    """Return the attributes read from something called `config`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "config"
    }


def test_every_knob_has_its_place_in_the_engine() -> None:
    read = {
        name
        for module, tree in find_trees().items()
        if is_below(module, "autotune.engine")
        for name in read_from_config(tree)
    }
    assert {*FIELDS} - read == set()
    # The workload sets its own knobs on itself; the engine has it do so.
    assert "user_knobs" in read_from_config(find_trees()["autotune.targets.workload"])
    assert "loaded.set_knobs(config)" in SOURCES["autotune.engine.loop"].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXPORTERS)
def test_every_knob_has_its_place_in_every_exporter(name: str) -> None:
    """Of settings that are all others than the baseline's, each is set, or has a line to be written by hand."""
    export = EXPORTERS[name](Request(config=CHANGED, baseline=PLAIN))
    assert sorted([*export.mapped, *export.unmapped]) == sorted(FIELDS)


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return its lines, signature included, docstring not: words for the reader are no reason to split code."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length


def test_functions_are_short() -> None:
    lengths = {
        f"{module}.{node.name}": length_of(node)
        for module, tree in find_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name for name, length in lengths.items() if length > LONGEST_FUNCTION}
    assert long - LONG_FUNCTIONS.keys() == set()


def test_packages_can_be_taken_in_at_a_glance() -> None:
    members = Counter(module.rpartition(".")[0] for module in SOURCES)
    large = {package: count for package, count in members.items() if count > MOST_MEMBERS}
    assert large.keys() - LARGE_PACKAGES.keys() == set(), large
    assert LARGE_PACKAGES.keys() - large.keys() == set()


def test_a_module_gives_each_name_one_meaning() -> None:
    for module, tree in find_trees().items():
        bound = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound += [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        twice = {name for name, count in Counter(bound).items() if count > 1}
        assert twice == set(), f"{module} binds {twice} twice"


def test_only_the_command_line_prints() -> None:
    offenders = [
        f"{module}:{node.lineno}"
        for module, tree in find_trees().items()
        if not is_below(module, "autotune.cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert offenders == []
