"""The inference engines that VeRL starts."""
