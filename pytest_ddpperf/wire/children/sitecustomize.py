"""Imported by every interpreter that a rank starts, because this folder comes first on its
PYTHONPATH: it imports the user's code from the rank's side, and notes the files that it opens. The
`sitecustomize` of the environment runs too."""

import contextlib
import importlib
import os
import sys

_folder = os.environ.get("PYTEST_DDPPERF_LAUNCH")
if _folder:
    try:
        from pytest_ddpperf.wire import opened

        opened.begin_child(_folder)
    except Exception:
        # without this plugin, or with another version of it: what the interpreter runs
        # is not known
        with (
            contextlib.suppress(OSError),
            open(os.path.join(_folder, "opened"), "ab") as _log,
        ):
            _log.write(b"p" + os.fsencode(sys.executable) + b"\0")

_here = os.path.dirname(os.path.abspath(__file__))
_ours = sys.modules.pop(__name__)
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
try:
    importlib.import_module(__name__)
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
finally:
    sys.modules.setdefault(__name__, _ours)
