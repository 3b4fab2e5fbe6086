"""The methods: each an objective and a decoder of one shape (`base`). Nothing here knows a model."""
