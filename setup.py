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
    # The kernels lie in cuda/, which must not become a package: it would shadow NVIDIA's `cuda`.
    packages=[*find_packages(include=["cdlrm", "cdlrm.*"]), "cdlrm.cuda"],
    package_dir={"cdlrm.cuda": "cuda"},
    package_data={"cdlrm": ["py.typed"], "cdlrm.cuda": ["*.cu", "*.cuh"]},
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
        "cuda12": ["cupy-cuda12x>=14", "nvidia-cuda-nvrtc-cu12>=12.8,<13"],
        "cuda13": ["cupy-cuda13x>=14", "nvidia-cuda-nvrtc>=13,<14"],
        "tensorboard": ["tensorboard>=2.17"],
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "tensorboard>=2.17",
            "matplotlib>=3.8",
            # CUDA's compilers, as in the cuda extras: kernels are compiled in the tests, without a GPU.
            "nvidia-cuda-nvrtc>=13,<14; sys_platform == 'linux'",
            "nvidia-cuda-nvrtc-cu12>=12.8,<13; sys_platform == 'linux'",
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
