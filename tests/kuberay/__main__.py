"""``python -m tests.kuberay FOLDER``: write the definitions again."""

import sys
from pathlib import Path

from tests.kuberay import write

write(Path(sys.argv[1]))
