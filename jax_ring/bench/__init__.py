"""What `jax-ring bench`, `jax-ring tune` and `jax-ring doctor` measure and check with."""
