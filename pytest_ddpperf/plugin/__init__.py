"""The pytest plugin: with `options` and `suite` the only package that imports pytest. The plugin
itself is `hooks`; the rest is imported when a distributed test needs it."""
