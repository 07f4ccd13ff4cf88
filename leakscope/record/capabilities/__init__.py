"""What this host, user and process can record, each thing found by trying it, with the command that mends
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from leakscope.errors import NotCapableError
from leakscope.model.capability import Capability
from leakscope.record.capabilities.host import Host
from leakscope.record.loader import choose_why

__all__ = [
    "Capability",
    "Host",
    "check_capabilities",
    "recording_loader",
    "recording_possible",
    "require_capable",
]


def check_capabilities(pid: int | None = None, host: Host | None = None) -> list[Capability]:
    """All capabilities, required ones first, each with the remedy for the detected platform first.

    Tiny maps, programs and probes are made and closed at once; nothing of them stays, no process is touched.

    :param pid: also check what can be recorded of this process.
    :raises BadInputError: when there is no process ``pid``.
    """
    from leakscope.record.capabilities.checks import CHECKS
    from leakscope.record.capabilities.process import check_process
    from leakscope.record.capabilities.remedies import ordered

    host = host or Host()
    found = check_process(host, pid) if pid is not None else []
    found = [check(host) for check in CHECKS] + found
    platform = host.platform()
    return [replace(capability, remedies=ordered(capability.remedies, platform)) for capability in found]


def recording_possible(capabilities: Iterable[Capability]) -> bool:
    """Whether nothing that is required is missing."""
    return not any(capability.blocks for capability in capabilities)


def recording_loader() -> tuple[str, str]:
    """The loader that `auto` takes here and why: (``bcc`` or ``core``, reason), or ("", what is missing)."""
    try:
        return choose_why()
    except NotCapableError as error:
        return "", str(error)


def require_capable(loader: str = "auto", host: Host | None = None) -> None:
    """Return when recording is possible here; for use before a recording starts.

    :param loader: the one that is asked for; what the others need is not looked at.
    :raises NotCapableError: in one line, what is missing first and the command that mends it.
    """
    from leakscope.record.capabilities.checks import REQUIRED_CHECKS, check_bcc
    from leakscope.record.capabilities.remedies import ordered

    host = host or Host()
    for check in REQUIRED_CHECKS:
        if check is check_bcc and loader == "core":
            continue
        capability = check(host)
        if capability.blocks:
            remedy = next(iter(ordered(capability.remedies, host.platform()).values()), "")
            raise NotCapableError(
                f"cannot record: {capability.name} is missing: {capability.detail}"
                + (f"; run: {remedy}" if remedy else "")
                + "; leakscope doctor shows everything"
            )
