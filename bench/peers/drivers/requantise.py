"""Write a GGUF file anew with the types that a reader lacks stored as Q8_0, the nearest that it has and loses nothing that matters."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

Q8_0 = GGMLQuantizationType.Q8_0


def types(file: Path) -> set[str]:
    """Names of the tensor types in a file."""
    return {tensor.tensor_type.name for tensor in GGUFReader(file).tensors}


def requantise(file: Path, out: Path, known: set[str]) -> None:
    """Metadata and tensors of known types are copied as they are."""
    reader = GGUFReader(file)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, held in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        of = held.types[-1] if held.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, held.contents(), held.types[0], sub_type=of)
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, tensor.data
        if kind.name not in known:
            kind, data = Q8_0, quantize(dequantize(data, kind), Q8_0)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
