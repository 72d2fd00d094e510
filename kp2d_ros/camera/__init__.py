"""A camera for machines without a driver: pictures of a source, with their calibration."""
