"""The operator: reconcilers of the kinds of `modelpool.dev`."""
