"""What ships: a folder with the code, the weights, the evidence, the envelope and the fallback.

::

    manifest.json        what this is, where it was built, the digest of every other file
    MANIFEST.sha256      the digest of manifest.json
    code/                the engine's own files; absent where the exported program is what ships
    fallback/program.pt2 the exported program, its weights taken out where they could be
    weights/model.safetensors
    evidence/            the run's report and records

No torch is imported until a bundle is written or loaded.
"""

from torchstone.bundle.envelope import Envelope, compile_check
from torchstone.bundle.load import Loaded, Stats, load
from torchstone.bundle.manifest import Manifest
from torchstone.bundle.write import Contents, write

__all__ = ["Contents", "Envelope", "Loaded", "Manifest", "Stats", "compile_check", "load", "write"]
