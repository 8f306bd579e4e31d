"""`python -m pellucid` is the `pellucid` command."""

import sys

from pellucid.cli.main import main

sys.exit(main())
