"""Which package provides a module, for hints: only packages that are known by that name.

`pip install NAME` for any NAME would be dangerous advice: a missing module is often the user's own file, and a
package of that name may belong to anybody.
"""

from __future__ import annotations

# Where the name to install is not the name to import.
_OTHER_NAMES = {
    "absl": "absl-py", "attr": "attrs", "bs4": "beautifulsoup4", "Crypto": "pycryptodome", "cv2":
    "opencv-python", "dateutil": "python-dateutil", "dotenv": "python-dotenv", "faiss": "faiss-cpu", "fitz":
    "PyMuPDF", "flash_attn": "flash-attn", "git": "GitPython", "google.protobuf": "protobuf", "grpc": "grpcio",
    "haiku": "dm-haiku", "huggingface_hub": "huggingface-hub", "hydra": "hydra-core", "IPython": "ipython",
    "jwt": "PyJWT", "mpl_toolkits": "matplotlib", "open_clip": "open-clip-torch", "PIL": "pillow",
    "pkg_resources": "setuptools", "pynvml": "nvidia-ml-py", "pytorch_lightning": "pytorch-lightning",
    "rouge_score": "rouge-score", "sentence_transformers": "sentence-transformers", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "torch_geometric": "torch-geometric", "umap": "umap-learn", "yaml": "PyYAML",
    "zmq": "pyzmq",
}  # fmt: skip
# Where both names are the same, up to '_' and '-'.
_SAME_NAMES = frozenset((
    "accelerate", "aiohttp", "albumentations", "anthropic", "bitsandbytes", "bokeh", "boto3", "botocore",
    "catboost", "click", "cloudpickle", "colorama", "comet_ml", "cupy", "dask", "datasets", "decord",
    "diffusers", "dill", "duckdb", "einops", "evaluate", "fastai", "fastapi", "fastparquet", "filelock", "fire",
    "flask", "flax", "fsspec", "ftfy", "gcsfs", "gdown", "gensim", "gradio", "gymnasium", "h5py", "httpx",
    "hyperopt", "imageio", "imgaug", "jax", "jaxlib", "jieba", "jinja2", "joblib", "jsonlines", "jsonschema",
    "kornia", "librosa", "lightgbm", "lightning", "llvmlite", "lmdb", "loguru", "lpips", "lxml", "matplotlib",
    "mlflow", "monai", "moviepy", "msgpack", "neptune", "nest_asyncio", "networkx", "nibabel", "ninja", "nltk",
    "numba", "numexpr", "numpy", "omegaconf", "onnx", "onnxruntime", "openai", "optax", "optuna", "orjson",
    "packaging", "pandas", "paramiko", "peft", "plotly", "polars", "psutil", "pyarrow", "pycocotools",
    "pydantic", "pydub", "pytest", "pytz", "ray", "redis", "regex", "requests", "rich", "s3fs", "sacrebleu",
    "safetensors", "scipy", "seaborn", "sentencepiece", "setproctitle", "shap", "shapely", "simplejson", "six",
    "smart_open", "soundfile", "spacy", "sqlalchemy", "stable_baselines3", "statsmodels", "submitit", "sympy",
    "tabulate", "tenacity", "tensorboard", "tensorboardX", "tensorflow", "termcolor", "tiktoken", "timm",
    "tokenizers", "toml", "tomli", "torch", "torchaudio", "torchdata", "torchmetrics", "torchtext",
    "torchvision", "tqdm", "transformers", "trimesh", "triton", "trl", "typer", "ujson", "urllib3", "uvicorn",
    "vllm", "wandb", "webdataset", "websockets", "xarray", "xformers", "xgboost", "xxhash", "yacs", "zarr",
    "zstandard",
))  # fmt: skip


def package_of(module: str) -> str | None:
    """The package to install for `import MODULE`; None when none is known by that name."""
    top = module.split(".")[0]
    found = _OTHER_NAMES.get(module) or _OTHER_NAMES.get(top)
    return found or (top.replace("_", "-") if top in _SAME_NAMES else None)


def install_hint(module: str) -> str:
    """What to do about a missing module."""
    package = package_of(module)
    if package is not None:
        return f"pip install {package}"
    top = module.split(".")[0]
    return (
        f"is '{top}' a file of your own? Then start the command from the folder that has it, or add that folder to "
        f"PYTHONPATH. If it is a package, its documentation names what to install: it need not be called '{top}'"
    )
