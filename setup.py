"""Packaging of cdlrm.  Build system and tool settings are in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

setup(
    name="cdlrm",
    version="0.1.0",
    description="Train large DLRM models through an exact look-ahead embedding cache",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["cdlrm", "cdlrm.*"]),
    package_data={"cdlrm": ["py.typed"]},
    entry_points={"console_scripts": ["cdlrm = cdlrm.cli:main"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=2",
        "numba>=0.61",
        "pyarrow>=15",
        "safetensors>=0.4",
        "torchmetrics>=1.4",
        "tqdm>=4.64",
        "pyyaml>=6",
    ],
    extras_require={
        "cuda12": ["cupy-cuda12x>=13.3"],
        "cuda13": ["cupy-cuda13x>=13.6"],
        "tensorboard": ["tensorboard>=2.17"],
        "test": [
            "pytest>=8",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "tensorboard>=2.17",
            "matplotlib>=3.8",
            "nbclient>=0.10",
            "nbformat>=5.10",
            "ipykernel>=6.29",
        ],
        "plot": ["matplotlib>=3.8"],
        "notebook": ["matplotlib>=3.8", "notebook>=7", "nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"],
        "torchrec": ["torchrec>=1.0"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    platforms=["manylinux x86_64", "manylinux aarch64"],
)
