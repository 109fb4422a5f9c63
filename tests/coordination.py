"""What the client of JAX's coordination service does with keys and values, in one process."""

import jax


class Store:
    """Keys and values, as several processes of a job share them."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [(k, v) for k, v in self.values.items() if k.startswith(f"{key}/")]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} in {milliseconds} ms")
        return self.values[key]

    def key_value_delete(self, key):
        self.values.pop(key, None)
