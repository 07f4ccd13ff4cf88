"""What a host can record: one result of `leakscope doctor` a capability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["ok", "degraded", "missing", "unknown"]
"""ok: works. degraded: works with a stated loss. missing: does not work. unknown: could not be told from
here.
"""

Platform = Literal["debian", "fedora", "container", "kubernetes"]
PLATFORMS: dict[Platform, str] = {
    "debian": "Debian, Ubuntu",
    "fedora": "Fedora, RHEL",
    "container": "container",
    "kubernetes": "Kubernetes pod",
}
"""Where a remedy applies, and how the place is called in print."""


@dataclass(frozen=True)
class Capability:
    """One thing that recording needs or gains from.

    ``detail`` is what was found, ``needed_for`` what is lost without it, ``remedies`` the exact command for
    each platform, that of the detected platform first. ``required``: without it nothing can be recorded.
    """

    name: str
    state: State
    detail: str
    needed_for: str
    required: bool = False
    remedies: dict[Platform, str] = field(default_factory=dict)

    @property
    def blocks(self) -> bool:
        """Whether this alone makes recording impossible."""
        return self.required and self.state == "missing"
