"""How numbers are stored in pages and weights.

    codec          Codec: how one vector of numbers is stored
    kv_format      KVFormat: keys and values of full attention; kv_tiles: how kernels write them
    page_layout    PageFormat: the vectors of DeepSeek-V4; page_format: their stores and loads
    fp8            E4M3 with one f32 scale for each vector
    small_floats   numbers of one byte and less: E4M3, E2M1, E8M0

Letters: N pages, P entries of a page, D channels of a vector, M vectors.
"""
