"""pytest-leakscope: ``@pytest.mark.leakscope`` runs a test again and again while it is recorded, and judges what it
leaves behind.

Nothing but pytest is imported here: whoever has no marked test pays nothing.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from leakscope.testing.settings import Settings

MARKER = "leakscope"
PROPERTY = "leakscope"
_MODES = ("off", "auto", "require")
_INI = {
    "leakscope_repeat": "iterations that are judged (default 20)",
    "leakscope_warmup": "iterations before them (default 5)",
    "leakscope_max_growth": "what the judged iterations may leave behind in all, such as 1MiB (default: anything but a "
    "leak)",
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Options and ini keys."""
    group = parser.getgroup("leakscope", "memory leaks (leakscope)")
    group.addoption(
        "--leakscope",
        choices=_MODES,
        help="marked tests: off = run once; auto = record where this is permitted, else counters alone; require = fail "
        "where they cannot be recorded, or not judged (default: ini key leakscope, else auto)",
    )
    group.addoption("--leakscope-report", metavar="FILE", help="write all judgements to FILE as JSON")
    group.addoption("--leakscope-captures", metavar="DIR", help="keep the capture of each marked test in DIR")
    parser.addini("leakscope", "off, auto or require: as --leakscope", default="auto")
    parser.addini("leakscope_report", "as --leakscope-report", default="")
    parser.addini("leakscope_layers", "layers that are judged: kernel host gpu", type="args", default=[])
    parser.addini("leakscope_malloc", "record the heap too (default true)", type="bool", default=True)
    for name, text in _INI.items():
        parser.addini(name, text, default="")


def pytest_configure(config: pytest.Config) -> None:
    """The marker, and the plugin's state."""
    config.addinivalue_line(
        "markers",
        "leakscope(max_growth=None, layers=['kernel', 'host', 'gpu'], repeat=20, warmup=5, malloc=True): run the test "
        "repeatedly while this process is recorded; fail when iterations leave memory behind",
    )
    mode = config.getoption("--leakscope") or config.getini("leakscope")
    if mode not in _MODES:
        raise pytest.UsageError(f"leakscope = {mode}: choose {', '.join(_MODES)}")
    config.pluginmanager.register(Plugin(config, mode), "leakscope-session")


class Plugin:
    """The plugin's part that has a state: one a session, in each worker of xdist and in what controls them."""

    def __init__(self, config: pytest.Config, mode: str) -> None:
        self._config = config
        self._mode = mode
        self._refused = ""  # why this host cannot record: asked once a session
        self._results: list[dict[str, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Say at once what is wrong with a marker."""
        if self._mode == "off" or item.get_closest_marker(MARKER) is None:
            return
        from leakscope.errors import BadInputError

        try:
            if not isinstance(item, pytest.Function) or _is_unittest(item):
                raise BadInputError("only for test functions and methods of plain classes, not for unittest.TestCase")
            self._settings(item)
        except BadInputError as error:
            raise pytest.fail.Exception(f"@pytest.mark.leakscope: {error}", pytrace=False) from None

    @pytest.hookimpl(wrapper=True, trylast=True)  # innermost: what other plugins make of the test is repeated
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Put the repetition around the test function."""
        if self._mode == "off" or pyfuncitem.get_closest_marker(MARKER) is None:
            return (yield)
        from leakscope.errors import LeakscopeError
        from leakscope.testing.repeat import repeated
        from leakscope.testing.run import LeakTest

        test = LeakTest(
            self._settings(pyfuncitem),
            record=not self._refused,
            reason=self._refused,
            keep=self._capture(pyfuncitem.nodeid),
        )
        original = pyfuncitem.obj
        pyfuncitem.obj = repeated(original, test)
        try:
            result = yield
        except LeakscopeError as error:
            raise pytest.fail.Exception(f"leakscope: {error}", pytrace=False) from None
        except BaseException:
            if test.number > 1:
                where = f"raised in iteration {test.number}, those of the warm-up included"
                pyfuncitem.add_report_section("call", "leakscope", where)
            raise
        finally:
            pyfuncitem.obj = original
            self._refused = self._refused or test.refused
        self._judge(pyfuncitem, test.outcome)
        return result

    def _judge(self, item: pytest.Function, outcome: dict[str, Any]) -> None:
        said = outcome.pop("text")
        item.user_properties.append((PROPERTY, json.dumps({"test": item.nodeid} | outcome)))
        if self._mode == "require" and not outcome["recorded"]:
            said = f"leakscope: no recording, and --leakscope=require: {outcome['not_recorded_because']}\n{said}"
            pytest.fail(said, pytrace=False)
        if not outcome["passed"] or (self._mode == "require" and outcome["verdict"] == "inconclusive"):
            pytest.fail(said, pytrace=False)
        item.add_report_section("call", "leakscope", said)

    def _settings(self, item: pytest.Item) -> Settings:
        """Ini values, then markers from the module's to the function's own. Raises BadInputError."""
        from leakscope.errors import BadInputError
        from leakscope.testing.settings import settings

        values: dict[str, Any] = {"malloc": self._config.getini("leakscope_malloc")}
        for name in _INI:
            if value := self._config.getini(name):
                values[name.removeprefix("leakscope_")] = value
        if layers := self._config.getini("leakscope_layers"):
            values["layers"] = layers
        for marker in reversed(list(item.iter_markers(MARKER))):
            if marker.args:
                raise BadInputError(f"takes no positional arguments, was given {marker.args[0]!r}")
            values |= marker.kwargs
        return settings(values)

    def _capture(self, nodeid: str) -> Path | None:
        """Where the capture of a test is to stay."""
        directory = self._config.getoption("--leakscope-captures")
        if not directory:
            return None
        import re

        place = self._config.invocation_params.dir / directory  # a test may change the working directory
        place.mkdir(parents=True, exist_ok=True)
        return place / (re.sub(r"[^\w.-]+", "_", nodeid)[-150:] + ".lscope")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather judgements: those of workers arrive in the process that controls them."""
        if report.when == "call":
            self._results += [json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line on what was not recorded, as nobody looks into the sections of tests that pass."""
        without = [result for result in self._results if not result["recorded"]]
        if without:
            terminalreporter.write_sep("=", "leakscope")
            reasons = sorted({str(result["not_recorded_because"]) for result in without})
            terminalreporter.write_line(
                f"{len(without)} of {len(self._results)} leak tests were not recorded, so kernel and GPU memory went "
                f"unseen: {'; '.join(reasons)}"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after the summary
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Write the JSON report."""
        result = yield
        name = self._config.getoption("--leakscope-report") or self._config.getini("leakscope_report")
        if not name or hasattr(self._config, "workerinput"):
            return result
        import os

        place = self._config.invocation_params.dir / name
        aside = place.with_name(f".{place.name}.{os.getpid()}")
        results = sorted(self._results, key=lambda result: str(result["test"]))
        try:
            aside.write_text(json.dumps({"schema": "leakscope-tests/1", "tests": results}, indent=1) + "\n")
            aside.replace(place)
        except OSError as error:
            pytest.exit(f"leakscope: --leakscope-report {name}: {error.strerror}", pytest.ExitCode.USAGE_ERROR)
        return result


def _is_unittest(item: pytest.Item) -> bool:
    """pytest runs methods of unittest.TestCase through that class, past the hook that repeats."""
    return type(item).__name__ == "TestCaseFunction"
