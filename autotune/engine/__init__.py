"""The one place where a knob becomes an effect on torch: small functions, one file per family of knobs."""
