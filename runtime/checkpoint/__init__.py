"""Reading checkpoint folders: safetensors by mmap, sharded or not, full or compressed-tensors pack-quantized."""

from nibblelm.checkpoint.folder import Checkpoint, file_in, open_checkpoint
from nibblelm.checkpoint.hub import resolve
from nibblelm.checkpoint.quantization import Quantization, Scheme, quantization_config
from nibblelm.checkpoint.safetensors_file import SafetensorsFile, TensorInfo

__all__ = [
    "Checkpoint",
    "Quantization",
    "SafetensorsFile",
    "Scheme",
    "TensorInfo",
    "file_in",
    "open_checkpoint",
    "quantization_config",
    "resolve",
]
