"""Train one model across a device, an edge server and a cloud machine with PyTorch Lightning."""
