"""`python -m tokentwin` is `tokentwin`."""

from __future__ import annotations

import sys

from tokentwin.cli import main

sys.exit(main())
