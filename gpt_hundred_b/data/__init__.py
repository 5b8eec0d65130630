"""Text -> tokens -> samples."""
