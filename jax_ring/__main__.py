"""`python -m jax_ring` is `jax-ring`."""

from jax_ring.cli import main

if __name__ == "__main__":
    main()
