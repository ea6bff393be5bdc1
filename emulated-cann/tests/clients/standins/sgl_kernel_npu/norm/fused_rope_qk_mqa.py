"""Is absent, so that SGLang uses its own rotary embedding, as with older releases of sgl_kernel_npu."""

raise ImportError("the stand-in for sgl_kernel_npu has no fused_rope_qk_mqa")
