/*
 * Carries one forwarded connection inside the guest (docs/KUBERNETES.md, "Port-forward").
 *
 *   relay        holds its container open until it is killed
 *   relay PORT   connects to that port of the guest's loopback, IPv4 first, and copies both ways between the socket and
 *                its standard streams. Ends with 0 at the end of what the listener says; with connect's errno when
 *                nothing listens.
 *
 * The guest's images need not contain any program, so the shim copies this one into its share: static, no files needed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Bytes: one read of a stream; the shim reads at most 256 KiB of a process's output at a time. */
#define BUFFER_BYTES 65536

/* All that can be read from `from` is in `to`, up to its end or an error of either. */
static void copy(int from, int to)
{
	static char buffer[BUFFER_BYTES];
	ssize_t got, put, sent;

	while ((got = read(from, buffer, sizeof buffer)) > 0)
		for (sent = 0; sent < got; sent += put)
			if ((put = write(to, buffer + sent, got - sent)) <= 0)
				return;
}

/* A connected socket, or -1 with errno set. */
static int dial(const struct sockaddr *address, socklen_t length)
{
	int fd = socket(address->sa_family, SOCK_STREAM, 0), cause;

	if (fd < 0 || connect(fd, address, length) == 0)
		return fd;
	cause = errno;
	close(fd);
	errno = cause;
	return -1;
}

static int dial_loopback(int port)
{
	struct sockaddr_in ipv4 = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)
	};
	struct sockaddr_in6 ipv6 = {
		.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT
	};
	int fd = dial((struct sockaddr *)&ipv4, sizeof ipv4);

	return fd >= 0 ? fd : dial((struct sockaddr *)&ipv6, sizeof ipv6);
}

int main(int argc, char **argv)
{
	int fd;

	if (argc < 2) {
		signal(SIGCHLD, SIG_IGN); /* processes that lose their parent become ours: the kernel reaps them */
		for (;;)
			pause();
	}
	if ((fd = dial_loopback(atoi(argv[1]))) < 0)
		return errno;
	switch (fork()) {
	case -1:
		return errno;
	case 0: /* client to listener, for as long as the other half lives */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		copy(STDIN_FILENO, fd);
		shutdown(fd, SHUT_WR);
		return 0;
	default:
		copy(fd, STDOUT_FILENO);
		return 0;
	}
}
