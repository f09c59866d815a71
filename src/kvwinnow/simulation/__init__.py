"""What a policy keeps, token by token, without a model: traces of attention, and the policies replayed on them."""
