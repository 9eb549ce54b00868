"""Large bodies, which are parsed and checked outside of the process that serves."""
