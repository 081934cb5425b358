"""Model families: one file per `model_type`, found by name."""

if __name__ != "nibblelm.models":
    raise ImportError(f"this folder is the package 'nibblelm.models', not '{__name__}'")
