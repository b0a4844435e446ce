"""An OpenVINO model with a GGUF file's exact weights in float16; runs in peers/openvino.py's environment.

    VENV/bin/python -m bench.compare.openvino_f16 GGUF FOLDER OUT

OpenVINO GenAI reads GGUF, the graph that it makes is saved, and each chain that unpacks a quantised matrix,

    constant q -> Convert -> Subtract zero point -> Multiply scale -> Reshape -> Convert

gives way to a float16 constant of FOLDER's matrix (weights.py). The graph names no matrix: each is known by
its shape and its first rows, from which the reader's own are at most a rounding away.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SAME = 0.2  # mean difference of rows that are the same but for rounding, against their mean
ROWS = 4


def matrices(folder: Path) -> dict[str, np.ndarray]:
    """The matrices of model.safetensors, mapped, not read."""
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, tensor in header.items():
        if name != "__metadata__" and len(tensor["shape"]) == 2:
            assert tensor["dtype"] == "F32", tensor
            start, shape = 8 + length + tensor["data_offsets"][0], tuple(tensor["shape"])
            found[name] = np.memmap(path, np.float32, "r", start, shape)
    return found


def saved(gguf: Path) -> Path:
    """A folder in which OpenVINO GenAI has saved what it read."""
    import openvino_genai

    folder = Path(tempfile.mkdtemp())
    os.symlink(gguf.absolute(), folder / gguf.name)
    openvino_genai.LLMPipeline(str(folder / gguf.name), "CPU", enable_save_ov_model=True)
    return folder


def user(node: Any) -> Any:
    """The only node that reads this one."""
    (target,) = node.output(0).get_target_inputs()
    return target.get_node()


def numbers(constant: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A constant of four- or eight-bit numbers as float32."""
    flat = np.asarray(constant.data).ravel()
    if "4" in str(constant.get_element_type()):
        flat = np.stack([flat & 15, flat >> 4], -1).ravel()[: int(np.prod(shape))]
    return flat.reshape(shape).astype(np.float32)


def name_of(rows: np.ndarray, shape: tuple[int, int], left: dict[str, np.ndarray]) -> str:
    """The matrix of that shape whose first rows are these but for rounding."""
    found = {n: float(np.abs(m[:ROWS] - rows).mean()) for n, m in left.items() if m.shape == shape}
    name = min(found, key=lambda n: found[n])
    if found[name] > SAME * float(np.abs(rows).mean()):
        raise ValueError(f"no matrix of shape {shape} is near what OpenVINO has read")
    return name


def replace(model: Any, left: dict[str, np.ndarray]) -> None:
    """Put float16 constants in the place of every quantised matrix, taking them out of `left`."""
    from openvino import opset15

    for node in list(model.get_ordered_ops()):
        kind = node.get_type_name() == "Constant" and str(node.get_element_type())
        shape = tuple(node.get_output_shape(0)) if kind else ()
        if not kind or ("uint4" not in kind and "uint8" not in kind) or len(shape) != 3 or shape[-1] == 1:
            continue
        subtract = user(user(node))
        multiply = user(subtract)
        last = user(user(multiply))
        scale = np.asarray(multiply.input_value(1).get_node().data).astype(np.float32)
        zero = numbers(subtract.input_value(1).get_node().input_value(0).get_node(), scale.shape)
        rows = ((numbers(node, shape)[:ROWS] - zero[:ROWS]) * scale[:ROWS]).reshape(ROWS, -1)
        name = name_of(rows, (shape[0], shape[1] * shape[2]), left)
        exact = opset15.constant(np.asarray(left.pop(name)).astype(np.float16))
        exact.set_friendly_name(name)
        converted = opset15.convert(exact, last.get_element_type())
        for target in list(last.output(0).get_target_inputs()):
            target.replace_source_output(converted.output(0))


def main() -> None:
    """Write OUT."""
    import openvino

    gguf, folder, out = (Path(word) for word in sys.argv[1:])
    read = saved(gguf)
    model, left = openvino.Core().read_model(str(read / "openvino_model.xml")), matrices(folder)
    replace(model, left)
    if left:
        raise ValueError(f"not in OpenVINO's graph: {', '.join(left)}")
    model.validate_nodes_and_infer_types()
    out.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, str(out / "openvino_model.xml"), compress_to_fp16=False)
    for path in read.glob("*tokenizer*"):
        shutil.copy(path, out)
    del model
    shutil.rmtree(read)


if __name__ == "__main__":
    main()
