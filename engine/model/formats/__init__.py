"""Quantized checkpoints: how each format stores a matrix, and how it is read.

    quant_config   quantization_config of config.json ─▶ WeightFormat
    gguf_file      the container of GGUF files            gguf_model   its names and config
    gguf_blocks, packed_int, kernels.scaled                EncodedTensor of each format

The loader sees EncodedTensors and nothing of the format: `dequantize` returns what the format's own library does,
bit for bit, and `to_grouped` gives the codes for the grouped products, row by row.
"""
