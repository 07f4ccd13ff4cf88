"""Finding Debian's `bcc` package (python3-bpfcc) from any Python.

bcc is pure Python over ctypes, installed for the system's interpreter only. A virtual environment or another
Python version does not see it, and the project named `bcc` on PyPI is something else. So the package is
loaded from its own folder, without adding the rest of that folder's packages to the path.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from leakscope.errors import NotCapableError

_PLACES = (
    "/usr/lib/python3/dist-packages",
    *(f"/usr/lib/python3.{minor}/site-packages" for minor in range(20, 5, -1)),
    *(f"/usr/lib64/python3.{minor}/site-packages" for minor in range(20, 5, -1)),
    "/usr/local/lib/python3/dist-packages",
)
_REMEDY = (
    "bcc is not installed; install it (Debian/Ubuntu: apt-get install python3-bpfcc; "
    "Fedora/RHEL: dnf install python3-bcc)"
)


def find_bcc() -> Path | None:
    """Folder of the BPF compiler's `bcc` package, or None. Any PyPI project of that name is not taken for it."""
    own = [Path(entry) for entry in sys.path if entry]
    for place in [*own, *map(Path, _PLACES)]:
        package = place / "bcc"
        if (package / "__init__.py").is_file() and (package / "libbcc.py").is_file():
            return package
    return None


def import_bcc() -> ModuleType:
    """The `bcc` package; raises NotCapableError with the command that installs it."""
    loaded = sys.modules.get("bcc")
    if loaded is not None and hasattr(loaded, "BPF"):
        return loaded
    package = find_bcc()
    if package is None:
        raise NotCapableError(_REMEDY)
    spec = importlib.util.spec_from_file_location(
        "bcc", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise NotCapableError(_REMEDY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    try:
        spec.loader.exec_module(module)
    except (OSError, ImportError) as error:
        del sys.modules["bcc"]
        raise NotCapableError(f"bcc is installed in {package} but cannot be loaded: {error}") from error
    return module
