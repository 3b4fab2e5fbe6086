"""Backbones and their files: the forward pass, Hugging Face model folders, tokenizers. Knows no method and no slots."""
