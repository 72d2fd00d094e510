"""The subcommands of `kp2d`, one file each."""
