"""How ranks find each other and sum tensors."""
