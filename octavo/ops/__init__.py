"""Operations of a decoder step besides attention. See docs/ops.md."""
