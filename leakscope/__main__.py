"""``python -m leakscope``: the same as the command ``leakscope``."""

import sys

from leakscope.cli.main import main

sys.exit(main())
