"""Hardens the functions of grpo.py: a function under @extra("models") is wrapped by the function of
the same name in models.py. A file imports only from the lines below its own:

    flags                     the command line
    runs                      a run's files on disk
    screen                    a run's messages
    rows, models              data; models, tokenizers, samplers
    agents, fast              environments; speed-ups
    preflight, packed, lora   checks; batches without padding; adapters
    ranks                     processes
    digests, tokens           fingerprints; texts
    errors                    errors as one line and an exit code

dashboard.py imports none of these. `import grpo` gives the running script, whatever its name.
"""

import sys
from pathlib import Path

WRAP_GRPO = True  # tells grpo.py that this is not another package called extras

NEEDED = "errors digests ranks tokens preflight packed fast rows models screen runs flags".split()
missing = [name for name in NEEDED if not Path(__file__).with_name(f"{name}.py").exists()]
if missing:
    print(f"extras/{missing[0]}.py is missing: copy the whole folder, or none", file=sys.stderr)
    sys.exit(2)
