"""grpo.py's functions once more, hardened: a function under @extra("models") has one of the same
name in models.py, which wraps it. A file imports only from floors below its own:

    flags                     the command line
    runs                      what a run keeps on disk
    screen                    what it shows
    rows, models              data; models, tokenizers, samplers
    agents, fast              environments; what is there for speed
    preflight, packed, lora   checks; batches without padding; adapters
    ranks                     processes
    digests, tokens           fingerprints; texts
    errors                    one line and an exit code

dashboard.py stands alone. All of them `import grpo`, which is the running page, whatever its name.
"""

import sys
from pathlib import Path

WRAP_GRPO = True  # grpo.py looks for this, as other packages are called extras, too

NEEDED = "errors digests ranks tokens preflight packed fast rows models screen runs flags".split()
missing = [name for name in NEEDED if not Path(__file__).with_name(f"{name}.py").exists()]
if missing:
    print(f"extras/{missing[0]}.py is missing: copy the whole folder, or none", file=sys.stderr)
    sys.exit(2)
