"""What `import thinwire as tw` offers, and that it stays quick to import."""

import subprocess
import sys

import thinwire as tw


def test_every_public_name_loads():
    for name in tw.__all__:
        assert getattr(tw, name) is not None
    assert set(tw.__all__) <= set(dir(tw))
    assert len(tw.__all__) <= 25


def test_importing_the_root_loads_neither_torch_nor_numba():
    code = "import sys, thinwire; print(sorted({'torch', 'numba', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
