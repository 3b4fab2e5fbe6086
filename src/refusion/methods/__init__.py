"""The methods: each an objective and a decoder of one shape (`base`), listed in `registry`. Nothing here knows a model."""
